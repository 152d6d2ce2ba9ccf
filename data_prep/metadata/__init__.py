"""Metadata extractors. Each adds its columns to the rows of documents."""
