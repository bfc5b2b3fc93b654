"""Claims that one hears about distributed training, each with a proof that computes or measures the truth."""
