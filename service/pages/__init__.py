"""The web page: the same jobs as the API's, for a person. It calls the API's routes and renders what they answer.

No rule about jobs lives here; the JSON API never reads the cookie, so that no other site can act through it.
"""

from fastapi import FastAPI

from service.pages import assets, job, queue, sign_in, submit
from service.pages.session import Sessions, SignInNeeded, to_sign_in
from service.settings import ServiceSettings


def install_pages(app: FastAPI, settings: ServiceSettings) -> None:
    """Add the page's routes; they are in no OpenAPI document."""
    app.state.sessions = Sessions(settings.secret_key.get_secret_value(), settings.session_s)
    app.exception_handler(SignInNeeded)(to_sign_in)
    for room in (assets, sign_in, queue, submit, job):
        app.include_router(room.router)
