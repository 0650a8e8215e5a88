"""Tests of the storage tier; `servers` builds the engines that share a storage folder."""
