__version__ = "1.4.0rc1"
