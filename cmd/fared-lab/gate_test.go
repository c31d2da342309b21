package main

import "github.com/fared/fared/internal/testkit/gate"

var _ = gate.Package{WithoutRaceDetector: "drives processes of its own binary; the packages below it run with the detector"}
