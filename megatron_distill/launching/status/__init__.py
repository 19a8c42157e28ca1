"""The state of runs, captures, rollouts and evaluations, from the files of their folders."""
