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

// InUse reports whether an error of New or Flush means that another agent is running.
func InUse(err error) bool {
	var socket *unixsocket.InUseError
	var file *journal.InUseError
	var namespace *ClaimedError
	if errors.As(err, &namespace) {
		return true
	}
	return errors.As(err, &socket) || errors.As(err, &file)
}

// Flush removes the kernel objects of any agent with these names and marks, and the journal, and returns a description of
// each removed kind of object. It fails while an agent holds the network namespace, the socket or the journal, because that
// agent would restore everything. A journal at another path survives; Config.Log then receives a warning.
func Flush(c Config) (removed []string, err error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	if c.Driver != Memory {
		claim, err := takeClaim("flush")
		if err != nil {
			return nil, err
		}
		defer claim.release()
	}
	if c.Socket != "" && isDirectory(filepath.Dir(c.Socket)) {
		l, err := unixsocket.Listen(unixsocket.Config{Path: c.Socket, Mode: 0o600, Setting: "--socket"}, c.Log)
		if err != nil {
			return nil, fmt.Errorf("socket: %w", err)
		}
		defer l.Close()
	}
	journaled := c.Journal == ""
	if c.Journal != "" && isDirectory(filepath.Dir(c.Journal)) {
		_, statErr := os.Stat(c.Journal)
		if err := journal.Remove(c.Journal); err != nil {
			return nil, err
		}
		if !errors.Is(statErr, fs.ErrNotExist) {
			removed, journaled = append(removed, "journal "+c.Journal), true
		}
	}
	more, err := flushDrivers(&c)
	if len(more) > 0 && !journaled {
		c.Log.Warn("no journal was found: an agent with another --socket or --journal restores all objects at its next start; also flush with that agent's flags", "looked_at", c.Journal)
	}
	return append(removed, more...), err
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}
