"""What the browser tests ask of a page. Knows no test."""

from collections.abc import Callable

from playwright.sync_api import Page

Open = Callable[..., Page]

# Text whose contrast with what lies behind it is below what WCAG 2.2 asks at level AA (4.5 to 1).
PALE_TEXT = """() => {
  const parse = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = parse(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const pale = new Set();
  for (const element of document.querySelectorAll("body *")) {
    const speaks = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!speaks || !element.checkVisibility()) continue;
    const [a, b] = [parse(getComputedStyle(element).color), behind(element)].map(light).sort((x, y) => y - x);
    const words = element.textContent.trim().slice(0, 40);
    if ((a + 0.05) / (b + 0.05) < 4.5) pale.add(`${element.tagName}.${element.className}: ${words}`);
  }
  return [...pale];
}"""
