package pods

import "github.com/fared/fared/internal/testkit/gate"

var _ = gate.Package{WithoutRaceDetector: "drives other processes", HostNetwork: "fetches other plugins from the module proxy"}
