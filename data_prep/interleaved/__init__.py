"""Prepare tars of documents with images, and the indexes that training needs to read them."""
