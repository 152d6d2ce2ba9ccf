"""Extractors of metadata: each adds its columns to the rows of documents."""
