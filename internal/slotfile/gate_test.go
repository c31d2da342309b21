package slotfile

import "github.com/fared/fared/internal/testkit/gate"

var _ = gate.Package{Computes: "waits for no timer of a protocol"}
