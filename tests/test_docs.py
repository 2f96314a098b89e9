"""What the documentation says is current; `tests/e2e/test_guides.py` follows it."""

from docs import settings as settings_page


def test_the_page_of_settings_is_current():
    written = settings_page.PAGE.read_text(encoding="utf-8")
    assert written == settings_page.page(), "run `python -m docs.settings`"
