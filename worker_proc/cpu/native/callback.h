// Functions as arguments of functions that are compiled once, for all of them.
#pragma once

namespace rhizome {

// Calls a function that outlives it.
template <class... Args>
class Callback {
 public:
  template <class Function>
  Callback(const Function& function)  // one is made of any function
      : function_(&function), run_([](const void* called, Args... args) { (*static_cast<const Function*>(called))(args...); }) {}

  void operator()(Args... args) const { run_(function_, args...); }

 private:
  const void* function_;
  void (*run_)(const void*, Args...);
};

}  // namespace rhizome
