// What every exported function is declared with: C names, visible outside of the library.
#pragma once

#define RHIZOME_EXPORT extern "C" __attribute__((visibility("default")))
