"""What a trained model is worth: result tables, curves, and text from it."""
