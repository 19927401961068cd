"""FastAPI with the model in its process, as tutorials have it: python -m benchmarks.peers.fastapi_server --port 9000 --pids DIR"""

from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from benchmarks.peers.model import classifier, options

if __name__ == "__main__":
    made = classifier(options())
    app = FastAPI()

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        """One image after the other: two at a time, on the same cores, take as long together and longer each."""
        return made.classify([made.tensor(await request.body())])[0]

    uvicorn.run(app, host="127.0.0.1", port=options().port, log_level="warning")
