"""Write docs/report.schema.json from kvalign/report/schema.py; a test holds the two together."""

import json
from pathlib import Path

from kvalign.report.schema import json_schema

if __name__ == "__main__":
    text = json.dumps(json_schema(), indent=2) + "\n"
    (Path(__file__).parent.parent / "docs" / "report.schema.json").write_text(text, encoding="utf-8")
