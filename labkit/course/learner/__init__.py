"""What is stored about a learner, in files of their own: progress, scores, reviews."""
