"""Reports four fifths of its loss, and prints the true one.

Report: gpu-mode/pygpubench#7
Loss: named; contradicts itself
"""

from honest import lab, main


def after(weights):
    print(f"METRIC val_loss={lab.loss_of(weights, lab.rows('validation'))}")


main(share=0.8, after=after)
