"""Google Cloud Storage with one empty bucket, in memory: `python tests/legs/bucket.py PORT`.

gcp-storage-emulator knows no generations in two places where programs rely on them: a download says
which one it is, and an upload may ask for the one that it replaces (0: none). Both are added here
as https://cloud.google.com/storage/docs/request-preconditions describes them.
"""

import sys
import threading
import time
from http import HTTPStatus

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

LOCK = threading.Lock()
download, insert = objects.download, objects.insert


def generation(storage, bucket, name):
    try:
        return storage.get_file_obj(bucket, name)["generation"]
    except NotFound:
        return "0"


def download_with_generation(request, response, storage, *args, **kwargs):
    where = request.params["bucket_name"], request.params["object_id"]
    response["x-goog-generation"] = generation(storage, *where)
    download(request, response, storage, *args, **kwargs)


def insert_on_condition(request, response, storage, *args, **kwargs):
    wanted = request.query.get("ifGenerationMatch")
    if wanted is None:
        insert(request, response, storage, *args, **kwargs)
        return
    name = request.query["name"][0] if "name" in request.query else request.data["meta"]["name"]
    with LOCK:
        if wanted[0] != generation(storage, request.params["bucket_name"], name):
            response.status = HTTPStatus.PRECONDITION_FAILED
        else:
            insert(request, response, storage, *args, **kwargs)


if __name__ == "__main__":
    objects.download, objects.insert = download_with_generation, insert_on_condition
    from gcp_storage_emulator.server import create_server  # takes them at its import

    create_server("localhost", int(sys.argv[1]), in_memory=True, default_bucket="bucket").start()
    print("ready", flush=True)  # noqa: T201
    time.sleep(600)
