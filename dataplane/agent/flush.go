package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/fared/fared/dataplane/internal/journal"
	"github.com/fared/fared/internal/unixsocket"
)

// InUse says that an error of New or Flush is about another agent that runs.
func InUse(err error) bool {
	var socket *unixsocket.InUseError
	var file *journal.InUseError
	return errors.As(err, &socket) || errors.As(err, &file)
}

// Flush removes from the kernel what any agent with these names and marks made, and the journal, and says what that was, a
// line each. It refuses while an agent has the socket or the journal: that one would put everything back.
func Flush(c Config) (removed []string, err error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	if c.Socket != "" && isDirectory(filepath.Dir(c.Socket)) {
		l, err := unixsocket.Listen(unixsocket.Config{Path: c.Socket, Mode: 0o600, Setting: "--socket"}, c.Log)
		if err != nil {
			return nil, fmt.Errorf("socket: %w", err)
		}
		defer l.Close()
	}
	if c.Journal != "" && isDirectory(filepath.Dir(c.Journal)) {
		_, statErr := os.Stat(c.Journal)
		if err := journal.Remove(c.Journal); err != nil {
			return nil, err
		}
		if !errors.Is(statErr, fs.ErrNotExist) {
			removed = append(removed, "journal "+c.Journal)
		}
	}
	more, err := flushDrivers(&c)
	return append(removed, more...), err
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}
