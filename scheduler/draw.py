"""Drawing of timelines, planned, emulated or measured alike: on a terminal, as a picture, as a trace for Perfetto.

``terminal_grid`` and ``split_table`` return rich renderables; ``save_picture`` writes PNG or SVG, ``save_perfetto``
JSON for https://ui.perfetto.dev. All take one timeline or several, which then share one time scale.
"""

from tessera_rt.scheduler.draw_perfetto import perfetto_trace, save_perfetto
from tessera_rt.scheduler.draw_picture import save_picture
from tessera_rt.scheduler.draw_terminal import split_table, terminal_grid

__all__ = ["perfetto_trace", "save_perfetto", "save_picture", "split_table", "terminal_grid"]
