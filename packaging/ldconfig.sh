#!/bin/sh
set -e
ldconfig
