package link

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netns"
)

// identity identifies a namespace. The zero value identifies none.
type identity struct {
	dev, ino uint64
}

// identify returns the identity of the namespace to which the file refers now.
func identify(name string) (identity, error) {
	var st unix.Stat_t
	if err := unix.Stat(netns.Path(name), &st); err != nil {
		return identity{}, fmt.Errorf("network namespace %s: %w", name, err)
	}
	return identity{dev: uint64(st.Dev), ino: st.Ino}, nil
}
