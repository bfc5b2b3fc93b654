"""What a GPU does otherwise than a CPU. The tests of a single part stand with that part, marked `gpu`."""
