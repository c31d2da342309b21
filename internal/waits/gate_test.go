package waits

import "github.com/fared/fared/internal/testkit/gate"

var _ = gate.Package{}
