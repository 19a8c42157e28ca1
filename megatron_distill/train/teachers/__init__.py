"""Teachers of a training step: live models and stores."""
