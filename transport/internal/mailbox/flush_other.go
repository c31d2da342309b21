//go:build !amd64 && !arm64

package mailbox

import (
	"errors"
	"runtime"
)

func newFlusher() (flusher, error) {
	return flusher{}, errors.New("memory that is not coherent needs a processor whose cache a process can flush: amd64 or arm64, not " + runtime.GOARCH)
}

func flushers() []flusher { return nil }
