"""Object stores: named bytes that several servers share.

    blob_store      what is asked of one
    opening         which of the following a URL names
    object_store    what obstore reaches: S3, Google Cloud Storage, Azure, a local directory
    mooncake_store  the DRAM of many servers, by Mooncake Store
    paced_store     tells of each request, so that it is counted, or waits
    register        a value that is replaced whole, by one writer at a time
    release         which release's objects lie there, and whose are where

Calls block. What the objects are is their writers' business: kvd's sessions, the service's
transcripts.
"""
