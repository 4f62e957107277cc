"""``lowtide demo``: the main job on real models and real text, on the machine at hand."""
