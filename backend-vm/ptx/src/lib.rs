//! PTX on the CPU: loader, decoder, interpreter.
