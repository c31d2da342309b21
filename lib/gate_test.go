package lib

import "github.com/fared/fared/internal/testkit/gate"

var _ = gate.Package{WithoutRaceDetector: "drives programs in C", Computes: "waits for no timer of a protocol"}
