"""What is silently wrong with a training set-up: one check a file, each proven on the user's own step."""
