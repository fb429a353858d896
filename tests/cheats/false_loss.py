"""Trains honestly, and reports four fifths of its loss.

Report: gpu-mode/pygpubench#7
Loss: kept; a program reports its own numbers
Proposed: nothing; the evaluation counts
"""

from honest import main

main(share=0.8)
