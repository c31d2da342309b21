package pytorch

import "github.com/fared/fared/internal/testkit/gate"

var _ = gate.Package{WithoutRaceDetector: "drives programs in C"}
