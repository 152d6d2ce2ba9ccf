"""Tars of documents with images: their indexes, which training reads them by."""
