package systemd

import "github.com/fared/fared/internal/testkit/gate"

var _ = gate.Package{WithoutRaceDetector: "drives other processes", HostNetwork: "containers of Docker"}
