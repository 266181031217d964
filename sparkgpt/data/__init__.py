"""The data path: sources, documents, byte cache, packing, and the stream of windows."""
