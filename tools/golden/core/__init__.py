"""What the generators of golden files share: gradients, the file format, packing, random inputs and tolerances."""
