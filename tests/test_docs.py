"""What the documentation says is current; the tests of the guides follow it."""

from docs import settings as settings_page


def test_the_page_of_settings_is_current():
    written = settings_page.PAGE.read_text(encoding="utf-8")
    assert written == settings_page.page(), "run `python -m docs.settings`"
