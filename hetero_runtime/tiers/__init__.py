"""Experts below host memory: in a file, read around the page cache or through it, or in memory that may be
swapped out.

    source (`base`)           a disk's records: one read brings one
      │  `reading`            a few threads, awaited reads first
    slabs of host memory      `host_slabs`; on device cpu what computation reads
      │  `two_hops`           on a GPU: hands on what has arrived,
      │  `returning`          and takes back what leaves it
    slabs of the device

`governor` gives memory back while the machine is short of it (`pressure`).
"""
