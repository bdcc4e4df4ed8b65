"""Sources: labelled images in shards, folders, arrays and Datasets."""
