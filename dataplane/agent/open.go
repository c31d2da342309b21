package agent

import "fmt"

// openDriver opens the driver that the configuration asks for.
func openDriver(c *Config) (*driver, error) {
	switch c.Driver {
	case Memory:
		return memoryDriver(), nil
	}
	return nil, fmt.Errorf("driver %s is not there", c.Driver)
}

// flushDrivers removes what all drivers made.
func flushDrivers(*Config) ([]string, error) { return nil, nil }
