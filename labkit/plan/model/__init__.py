"""What is trained: the sizes of a model, its layers, and the models that were published."""
