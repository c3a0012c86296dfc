"""Whether the API of this container answers: for health checks. Imports nothing of ours, for it runs every few seconds.

python -m service.alive     exit status 0 when it does
"""

import os
import sys
import urllib.error
import urllib.request

_ANSWER_S = 4.0


def _main() -> int:
    url = f"http://127.0.0.1:{os.environ.get('KVALIGN_PORT', '8400')}/healthz"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=_ANSWER_S) as answer:
            return 0 if answer.status == 200 else 1
    except (urllib.error.URLError, OSError):
        return 1


if __name__ == "__main__":
    sys.exit(_main())
