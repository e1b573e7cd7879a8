"""Pictures of timelines: a grid for the terminal, SVG, PNG, and a page with sliders."""

from lightning_pipeline.draw.page import draw_page
from lightning_pipeline.draw.png import draw_png
from lightning_pipeline.draw.steps import Step
from lightning_pipeline.draw.svg import draw_svg
from lightning_pipeline.draw.text import draw_text, draw_texts

__all__ = ["Step", "draw_page", "draw_png", "draw_svg", "draw_text", "draw_texts"]
