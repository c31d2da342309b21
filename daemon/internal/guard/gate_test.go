package guard

import "github.com/fared/fared/internal/testkit/gate"

var _ = gate.Package{WithoutRaceDetector: "starts goroutines in tests alone", Computes: "pure"}
