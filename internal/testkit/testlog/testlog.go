// Package testlog keeps the text of programs and logs for tests that read it while it is written.
package testlog

import (
	"bytes"
	"sync"
)

// Log is written and read by any goroutine. The zero value is empty.
type Log struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

// Write appends to the text. It never fails.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// String returns the text so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
