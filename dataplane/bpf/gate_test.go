package bpf

import "github.com/fared/fared/internal/testkit/gate"

var _ = gate.Package{WithoutRaceDetector: "waits for the kernel; the contract that calls it runs with the detector"}
