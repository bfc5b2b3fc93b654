"""What is kept of a learner, in files of their own: progress, scores, reviews."""
