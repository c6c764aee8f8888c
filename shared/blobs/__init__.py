"""Object stores: named bytes that several servers share.

    blob_store      the interface, and the errors
    opening         opens the store that a URL names
    object_store    stores by obstore: S3, Google Cloud Storage, Azure, a local directory
    mooncake_store  the DRAM of many servers, by Mooncake Store
    register        a value that is replaced whole, by one writer at a time
    release         the names of objects, and the release that they are of

Calls block. The writers define their objects: kvd's sessions, the service's transcripts.
"""
