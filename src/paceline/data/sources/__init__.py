"""Sources of labeled images: shards, folders, array files and map-style Datasets."""
