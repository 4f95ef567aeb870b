"""Sources of data and the LightningDataModules built on them, one file per source."""
