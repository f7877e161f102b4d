"""The quantizer: rotation, codebook, packing, codec, bounds, and the rival formats it is compared with."""
