"""Files at an address, such as `s3://bucket/train.beton`, read through a local copy that is filled while it is used."""
